"""One file per question: ``python -m benchmarks.bench_import``, or ``lowtide bench import``."""
