"""A technique from outside lowtide: dropout whose mask is drawn again in the backward pass instead of kept.

It pays where the input of the dropout is kept anyway, as behind a ReLU. A package would offer it by an entry
point:

    [project.entry-points."lowtide.techniques"]
    redraw = "example_technique:RedrawnDropout"
"""

from lowtide.techniques import (
    Check,
    Fidelity,
    Forward,
    Interval,
    Option,
    Price,
    Undo,
    recompute,
    replace_forward,
)


class Redrawn(Forward):
    """A dropout that keeps its input and the generator's state, and no mask."""

    def __call__(self, input):
        return recompute(self.plain, input, modules=[self.module])


class RedrawnDropout:
    """Draw dropout masks twice: the same ones, since the generator's state is kept (5 kB on a CPU)."""

    name = "redraw"
    kind = "saved"
    needs = "a nn.Dropout whose input another module keeps"
    conflicts = frozenset()

    def options(self, profile):
        dropouts = {path for path, kind in profile.graph.modules if kind == "Dropout"}
        kept = {(saved.storage, saved.needed_in) for saved in profile.saved}
        site = {
            op.module: None
            for op in profile.graph.ops
            if op.phase == "forward" and op.module in dropouts
            for value in op.inputs
            if any(storage == value.storage and path != op.module for storage, path in kept)
        }
        return [Option(self.name, tuple(site))] if site else []

    def price(self, option, profile):
        ops, removed, seconds = profile.graph.ops, [], 0.0
        masks = {s.storage: s.needed_in for s in profile.saved if s.made_in == s.needed_in}
        for path in option.site:
            forward = [op for op in ops if op.module == path and op.phase == "forward"]
            again = next(op.index for op in ops if op.module == path and op.phase == "backward")
            for mask in (s for s in profile.graph.storages if masks.get(s.id) == path):
                removed.append(Interval(mask.bytes, forward[-1].index + 1, again, f"mask of {path}"))
            seconds += sum(op.seconds for op in forward)
        return Price(Fidelity.BITWISE, removed=tuple(removed), compute_seconds=seconds)

    def apply(self, work, options):
        with Undo() as undo:
            for path in (path for option in options for path in option.site):
                undo.add(replace_forward(Redrawn(work.model.get_submodule(path)), path=path))
            return undo.keep()

    def check(self, option):
        return Check.EXACT
