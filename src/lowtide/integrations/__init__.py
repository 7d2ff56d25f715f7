"""lowtide inside of other tools, which call it by an entry point or a name."""
