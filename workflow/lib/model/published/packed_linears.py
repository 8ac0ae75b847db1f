"""Linears as GPTQ, AWQ and compressed-tensors publish them: packed codes in place of a weight.

Each weight is decoded whole, in fp32, and rounded to bf16:

* GPTQ: `qweight` int32 (in * bits / 32, out), `qzeros` (groups, out * bits / 32), `scales` (groups,
  out), `g_idx` (in,), the group of each input. Zeros are stored less 1, but in `gptq_v2`.
* AWQ (`gemm`): `qweight` int32 (in, out / 8), `qzeros` (groups, out / 8), `scales` (groups, out);
  the eight codes of an int32 belong to the columns 0, 2, 4, 6, 1, 3, 5, 7.
* compressed-tensors: as its own package decodes it, by the scheme that config.json has for the
  linear: integers, FP8, NVFP4, MXFP4."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch

from workflow.lib.model.architecture.quantization_settings import (
    FORMAT_NAMES,
    GPTQ_BITS,
    METHOD,
    PACKED_TYPES,
    said_value,
)
from workflow.lib.model.architecture.safetensors_headers import TensorInfo
from workflow.lib.system.errors import UserError

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in an int32, of the codes of eight columns
WEIGHT = ".weight"
Read = Callable[[str], torch.Tensor]
Tensors = Mapping[str, TensorInfo]


class PackedLinears(Protocol):
    """The linears of a checkpoint that have no 16-bit weight; `X.weight` is decoded of `X.*`."""

    codes: dict[str, str]  # stored name of the codes by the weight's name
    hidden: set[str]  # stored names that are parts of packed weights

    def shape(self, name: str, read: Read) -> tuple[int, ...]:
        """Return (out, in)."""

    def decoded(self, name: str, read: Read) -> torch.Tensor:
        """Return the weight (out, in) in bf16."""


def packed_linears(tensors: Tensors, settings: Mapping[str, Any]) -> PackedLinears | None:
    """Return the packed linears of `quantization_config`; None: another format."""
    kinds: dict[str, type[_GPTQ] | type[_CompressedTensors]] = {
        "gptq": _GPTQ,
        "awq": _AWQ,
        "compressed-tensors": _CompressedTensors,
    }
    kind = kinds.get(settings.get(METHOD, ""))
    return None if kind is None else kind(tensors, settings)


class _GPTQ:
    PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, tensors: Tensors, settings: Mapping[str, Any]) -> None:
        self._tensors, self._settings = tensors, settings
        ends = self.PARTS[0]
        linears = [name.removesuffix(ends) for name in tensors if name.endswith(ends)]
        self.codes = {f"{linear}{WEIGHT}": f"{linear}{ends}" for linear in linears}
        self.hidden = {f"{linear}{part}" for linear in linears for part in self.PARTS}
        _check_there(tensors, linears, self.PARTS[1:3])

    def shape(self, name: str, read: Read) -> tuple[int, ...]:
        linear = name.removesuffix(WEIGHT)
        return self._tensors[f"{linear}.scales"].shape[1], self._inputs(linear)

    def _inputs(self, linear: str) -> int:
        index = self._tensors.get(f"{linear}.g_idx")
        if index is not None:
            return index.shape[0]
        return self._tensors[f"{linear}.qweight"].shape[0] * 32 // int(self._settings["bits"])

    def decoded(self, name: str, read: Read) -> torch.Tensor:
        linear = name.removesuffix(WEIGHT)
        packed, scales = read(f"{linear}.qweight"), read(f"{linear}.scales").float()
        inputs = self._inputs(linear)
        bits = packed.shape[0] * 32 // inputs  # a module may have others than config.json says
        if bits not in GPTQ_BITS or len(packed) != -(-inputs * bits // 32):
            raise UserError(
                f"{linear}.qweight has {len(packed) * 32 / inputs:.3g} bits a weight; "
                f"{', '.join(map(str, GPTQ_BITS))} can be read. Set model.source to the original "
                "bf16, fp16 or fp32 checkpoint."
            )
        codes = _unpacked(packed.T, bits)[:, :inputs]
        zeros = _unpacked(read(f"{linear}.qzeros"), bits)
        if said_value(self._settings, FORMAT_NAMES["gptq"], "gptq") == "gptq":
            zeros = zeros + 1
        if f"{linear}.g_idx" in self._tensors:
            groups = read(f"{linear}.g_idx").long()
        else:
            groups = torch.arange(inputs) // (-(-inputs // len(scales)))
        weight = (codes - zeros.T[:, groups]) * scales.T[:, groups]
        return weight.to(torch.bfloat16)


class _AWQ(_GPTQ):
    def _inputs(self, linear: str) -> int:
        return self._tensors[f"{linear}.qweight"].shape[0]

    def decoded(self, name: str, read: Read) -> torch.Tensor:
        linear = name.removesuffix(WEIGHT)
        scales = read(f"{linear}.scales").float()
        codes, zeros = (
            _unpacked(read(f"{linear}{part}"), 4, places=AWQ_PLACES)
            for part in (".qweight", ".qzeros")
        )
        groups = torch.arange(len(codes)) // (len(codes) // len(scales))
        return ((codes - zeros[groups]) * scales[groups]).T.to(torch.bfloat16)


class _CompressedTensors:
    def __init__(self, tensors: Tensors, settings: Mapping[str, Any]) -> None:
        self._tensors, self._settings = tensors, settings
        self.codes: dict[str, str] = {}
        self.hidden: set[str] = set()
        for stored, info in tensors.items():
            linear = stored.removesuffix("_packed").removesuffix(WEIGHT)
            scaled = f"{linear}.weight_scale" in tensors and info.dtype in PACKED_TYPES
            if stored == f"{linear}.weight_packed" or (stored == f"{linear}{WEIGHT}" and scaled):
                self.codes[f"{linear}{WEIGHT}"] = stored
                self.hidden |= {stored, *self._parts(linear)} - {f"{linear}{WEIGHT}"}
        linears = [name.removesuffix(WEIGHT) for name in self.codes]
        _check_there(tensors, linears, (".weight_scale",))

    def _parts(self, linear: str) -> list[str]:
        ends = ("scale", "zero_point", "shape", "g_idx", "global_scale")
        return [name for end in ends if (name := f"{linear}.weight_{end}") in self._tensors]

    def shape(self, name: str, read: Read) -> tuple[int, ...]:
        stored, said = self.codes[name], f"{name}_shape"
        if said in self._tensors:
            return tuple(read(said).tolist())
        out, inputs = self._tensors[stored].shape
        return out, inputs if stored == name else inputs * 2  # two of 4 bits in a byte

    def decoded(self, name: str, read: Read) -> torch.Tensor:
        from compressed_tensors.compressors import BaseCompressor  # takes seconds

        linear = name.removesuffix(WEIGHT)
        scheme = self._scheme(linear)
        stored = [self.codes[name], *self._parts(linear)]
        parts = {part.removeprefix(f"{linear}."): read(part) for part in stored}
        form = scheme.format or self._config.format
        whole = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)
        weight: torch.Tensor = whole["weight"].to(torch.bfloat16)
        return weight

    @cached_property
    def _config(self) -> Any:
        from compressed_tensors.quantization import QuantizationConfig

        return QuantizationConfig.model_validate(dict(self._settings))

    def _scheme(self, linear: str) -> Any:
        from compressed_tensors.utils import is_match

        groups, module = self._config.config_groups.values(), torch.nn.Linear(1, 1, device="meta")
        fitting = [x for x in groups if len(groups) == 1 or is_match(linear, module, x.targets)]
        if not fitting:
            raise UserError(
                f"{linear} is packed, and no group of quantization_config.config_groups names it. "
                "The files do not belong together: download them again."
            )
        return fitting[0]


def _check_there(tensors: Tensors, linears: list[str], parts: tuple[str, ...]) -> None:
    """Raise `UserError` for a packed linear without what its codes are decoded by."""
    missing = [f"{x}{part}" for x in linears for part in parts if f"{x}{part}" not in tensors]
    if missing:
        raise UserError(
            f"{missing[0]} is not there, without which packed weights cannot be decoded. Complete "
            "the download, or set model.source to the original bf16, fp16 or fp32 checkpoint."
        )


def _unpacked(
    packed: torch.Tensor, bits: int, *, places: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the codes (rows, columns * 32 / bits) of int32, lowest bits first; places: order."""
    order = torch.tensor(places or range(32 // bits), dtype=torch.int32)
    codes: torch.Tensor = (packed.unsqueeze(-1) >> (order * bits)) & (2**bits - 1)
    return codes.flatten(-2)
