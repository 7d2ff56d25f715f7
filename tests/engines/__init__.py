import pytest

pytest.register_assert_rewrite("tests.engines.counting", "tests.engines.planned")  # they assert too
