"""A technique from outside lowtide: dropout that draws its mask again in backward instead of keeping it.

It pays where the dropout's input is kept anyway, as behind a ReLU. A package offers it by an entry point:

    [project.entry-points."lowtide.techniques"]
    redraw = "example_technique:RedrawnDropout"
"""

from lowtide import techniques as lt


class Redrawn(lt.Forward):
    """A dropout that keeps its input and the generator's state, and no mask."""

    def __call__(self, input):
        return lt.recompute(self.plain, input, modules=[self.module])


class RedrawnDropout:
    """Masks drawn twice are the same, since the generator's state is kept (5 kB on a CPU)."""

    name, kind, config, conflicts = "redraw", "hold", lt.Config, {}
    needs = "a nn.Dropout whose input another module keeps"

    def options(self, profile):
        graph, site = profile.graph, {}
        dropouts = {path for path, kind in graph.modules if kind == "Dropout"}
        for op in graph.ops:
            if op.phase == "forward" and op.module in dropouts:
                read = {value.storage for value in op.inputs}
                if any(s.storage in read and s.needed_in != op.module for s in profile.saved):
                    site[op.module] = True
        return [lt.Option(self.name, tuple(site))] if site else []

    def price(self, option, profile):
        graph, removed, seconds = profile.graph, [], 0.0
        masks = {s.storage: s.needed_in for s in profile.saved if s.made_in == s.needed_in}
        for path in option.site:
            mine = [op for op in graph.ops if op.module == path]
            last = max(op.index for op in mine if op.phase == "forward")
            again = min(op.index for op in mine if op.phase == "backward")
            kept = [s.bytes for s in graph.storages if masks.get(s.id) == path]
            removed += [lt.Interval(size, last + 1, again, f"mask of {path}") for size in kept]
            seconds += sum(op.seconds for op in mine if op.phase == "forward")
        return lt.Price(lt.Fidelity.BITWISE, removed=tuple(removed), compute_seconds=seconds)

    def apply(self, work, options):
        with lt.Undo() as undo:
            for path in (path for option in options for path in option.site):
                undo.add(lt.replace_forward(Redrawn(work.model.get_submodule(path)), path=path))
            return lt.Applied(work, undo.keep())

    def check(self, option):
        return lt.Check.EXACT
