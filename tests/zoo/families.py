"""Models of the zoo for tests of all of them: one of each family, the deeper ones in ``make soak``."""

from lowtide import zoo

from ..soak import in_soak

SAME = {"gpt2-medium", "gpt2-large", "gpt2-xl", "resnet101-1d", "resnet152-1d"}  # small, they are another's model
DEEPER = {"resnet34", "resnet101", "resnet152", "resnext101", "resnext152", "resnet34-1d", "resnet50-1d"}
FAMILIES = sorted(set(zoo.names()) - SAME - DEEPER) + in_soak(sorted(DEEPER))
EVERY = [*FAMILIES, *in_soak(sorted(SAME))]
