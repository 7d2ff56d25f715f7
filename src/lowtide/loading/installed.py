"""Training steps by name from torchvision, timm and transformers, where installed: random weights, no download."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.compat import pytree
from lowtide.errors import MissingExtra, WorkloadError, unknown_name
from lowtide.workload import Workload
from lowtide.zoo import make_optimizer, seeded


def torchvision(
    name: str,
    *,
    batch: int = 32,
    image: int = 224,
    seq: int | None = None,
    optimizer: str = "sgd",
    device: str = "cpu",
    **options: Any,
) -> Workload:
    """A classifier or segmenter of torchvision on random images; ``options`` go to its builder."""
    where = f"torchvision:{name}"
    _check_axis(where, "images", "image", "seq", seq)
    models = _import("torchvision.models")
    if name not in models.list_models():
        raise unknown_name("model of torchvision", name, models.list_models())
    kind = models.get_model_builder(name).__module__
    if any(other in kind for other in ("detection", "optical_flow", "video")):
        raise _write_your_own(where, "neither classifies nor segments images")
    segments = "segmentation" in kind
    chosen = {"num_classes": 21 if segments else 1000, **options}
    if segments:
        chosen.setdefault("weights_backbone", None)

    def build() -> tuple[nn.Module, Any]:
        target = (batch, image, image) if segments else (batch,)
        net = models.get_model(name, weights=None, **chosen)
        return net, (torch.randn(batch, 3, image, image), torch.randint(chosen["num_classes"], target))

    return _workload(build, _vision_loss, optimizer, device, where)


def timm(
    name: str,
    *,
    batch: int = 32,
    image: int | None = None,
    seq: int | None = None,
    optimizer: str = "sgd",
    device: str = "cpu",
    **options: Any,
) -> Workload:
    """A classifier of timm on random images of the size it is made for; ``options`` go to ``timm.create_model``."""
    where = f"timm:{name}"
    _check_axis(where, "images", "image", "seq", seq)
    library = _import("timm")
    if not library.is_model(name):
        raise unknown_name("model of timm", name, library.list_models())

    def build() -> tuple[nn.Module, Any]:
        net = library.create_model(name, pretrained=False, **options)
        channels, height, width = net.default_cfg["input_size"]
        size = (height, width) if image is None else (image, image)
        images = torch.randn(batch, channels, *size)
        return net.train(), (images, torch.randint(net.num_classes, (batch,)))

    return _workload(build, _vision_loss, optimizer, device, where)


def transformers(
    name: str,
    *,
    batch: int = 8,
    seq: int | None = None,
    image: int | None = None,
    optimizer: str = "adamw",
    device: str = "cpu",
    **options: Any,
) -> Workload:
    """A language model of transformers by its configuration's defaults; ``options`` change those.

    ``name`` is a model type: ``gpt2``, ``llama``, ``bert``, ``t5``. Labels are the ids; no keys are cached.
    """
    where = f"transformers:{name}"
    _check_axis(where, "tokens", "seq", "image", image)
    library = _import("transformers")
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    if name not in known:
        raise unknown_name("model type of transformers", name, known)
    config = library.AutoConfig.for_model(name, **{"use_cache": False, **options})
    heads = (library.AutoModelForMaskedLM, library.AutoModelForCausalLM, library.AutoModelForSeq2SeqLM)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # fills the decoder's first input; any id will do
    head = next((h for h in heads if type(config) in h._model_mapping), None)
    if head is None or not isinstance(getattr(config, "vocab_size", None), int):
        raise _write_your_own(where, "has no language-model head")
    longest = getattr(config, "max_position_embeddings", None) or 2**31
    length = min(512, longest) if seq is None else seq
    if length > longest:
        raise WorkloadError(
            f"{where} takes {longest} tokens, not {length}",
            hint=f"Add --arg max_position_embeddings={length}.",
        )

    def build() -> tuple[nn.Module, Any]:
        net = head.from_config(config)
        ids = torch.randint(config.vocab_size, (batch, length))
        return net.train(), {"input_ids": ids, "labels": ids}

    return _workload(build, _own_loss, optimizer, device, where)


def _workload(
    build: Callable[[], tuple[nn.Module, Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: str,
    device: str,
    where: str,
) -> Workload:
    """Build as the zoo does: the same parameters and batch on every device."""
    with seeded(0, torch.device(device)):
        try:
            net, batch = build()
        except TypeError as error:  # an option that this model does not have
            raise WorkloadError(str(error), where=where, hint="Check the --arg options.") from error
    net = net.to(device)
    batch = pytree.tree_map(lambda tensor: tensor.to(device), batch)
    return Workload(net, loss, batch, make_optimizer(optimizer, net, where=where), name=where)


def _check_axis(where: str, takes: str, option: str, wrong: str, size: int | None) -> None:
    if size is not None:
        raise WorkloadError(f"{where} takes {takes}", hint=f"Write --{option}, not --{wrong}.")


def _vision_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, target = batch
    out = model(images)
    heads = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,)
    first, *auxiliary = (F.cross_entropy(head, target) for head in heads)
    return sum(auxiliary, first)


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # transformers reads the position ids to see whether sequences are packed. Fake tensors have no values, so it
    # assumes that they are, and builds masks that the real step never has.
    masks = importlib.import_module("transformers.masking_utils")
    with mock.patch.object(masks, "find_packed_sequence_indices", _not_packed, create=True):
        return model(**batch).loss


def _not_packed(position_ids: Tensor) -> None:
    return None


def _import(module: str) -> Any:
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        if package == "transformers":
            raise MissingExtra("transformers", extra="transformers") from None
        raise WorkloadError(
            f"{package} is not installed",
            hint="Install the release that matches your torch, or use lowtide's own: zoo:resnet50.",
        ) from None
    except RuntimeError as error:  # torchvision built for another torch
        raise WorkloadError(
            f"{package} cannot be imported: {error}",
            hint=f"Install the {package} that matches torch {torch.__version__}.",
        ) from error


def _write_your_own(where: str, why: str) -> WorkloadError:
    return WorkloadError(
        f"{where} {why}",
        hint="Write a function that returns lowtide.Workload(model, loss, batch): train.py:workload.",
    )
