"""The decoder layers of a model, and the parts beside them."""

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.system.errors import UserError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks, by Transformers' `_no_split_modules` (FSDP2 makes subclasses)."""
    names = set(model._no_split_modules or ())
    layers = [
        module
        for module in model.modules()
        if names & {kind.__name__ for kind in type(module).__mro__}
        and not isinstance(module, nn.Embedding)
    ]
    if not layers:
        raise UserError(
            f"{type(model).__name__} names no decoder layer class (_no_split_modules): this model "
            "family cannot be sharded. Choose another model.source."
        )
    return layers


def other_parts(model: PreTrainedModel) -> list[str]:
    """Return the paths of parts without text (a vision tower), embedding and head."""
    text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    paths = [path for path, module in model.named_modules() if any(module is t for t in text)]
    parts: list[str] = []
    for path, _ in model.named_modules():
        inside = any(not x or f"{path}.".startswith(f"{x}.") for x in (*paths, *parts))
        around = any(f"{x}.".startswith(f"{path}.") for x in paths) or not path
        if not inside and not around:
            parts.append(path)
    return parts


def drop_other_parts_(model: PreTrainedModel) -> None:
    """Take those parts out of a meta-device model: they are neither allocated nor sharded."""
    for path in other_parts(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)
