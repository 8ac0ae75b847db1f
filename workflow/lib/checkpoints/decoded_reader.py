"""A checkpoint of which some weights are packed, read as if all were in 16 bits.

Packed names are hidden: a weight has its unpacked name, shape and type. Only requested tensors
are decoded.

Formats in place of 16-bit weights, decoded to bf16:

* FP8 (DeepSeek, Qwen): `X` in E4M3 and `X_scale_inv`, a factor for each block of rows and columns
  (`weight_block_size`), or one for the tensor. The last blocks may be cut.
* MXFP4 (gpt-oss): `X_blocks`, 16 bytes of two E2M1 values (the low half first) for each 32 inputs,
  and `X_scales`, a power of two for each, with a bias of 127 (OCP Microscaling, v1.0). They lie as
  (experts, out, in / 32, 16), the model's parameter as (experts, in, out).
* GPTQ: `qweight` int32 (in * bits / 32, out), `qzeros` (groups, out * bits / 32), `scales` (groups,
  out), `g_idx` (in,), the group of each input. An int32 of `qzeros` is stored minus 1 for each of
  its codes, except in `gptq_v2`: a code of 0 borrows from the next.
* AWQ (`gemm`): `qweight` int32 (in, out / 8), `qzeros` (groups, out / 8), `scales` (groups, out);
  the eight codes of an int32 belong to the columns 0, 2, 4, 6, 1, 3, 5, 7.
* compressed-tensors: as its own package decodes it, by the scheme that config.json has for the
  linear: integers, FP8, NVFP4, MXFP4."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.utils import unpack_tensor_to_dict

from workflow.lib.checkpoints.files.quantization_settings import (
    FORMAT_NAMES,
    GPTQ_BITS,
    METHOD,
    PACKED_TYPES,
    setting_value,
)
from workflow.lib.checkpoints.files.safetensors_headers import TensorInfo
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.system.checksums import RecordedFile
from workflow.lib.system.errors import UserError

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # positions in an int32 of the codes of eight columns
WEIGHT = ".weight"
Read = Callable[[str], torch.Tensor]
Tensors = Mapping[str, TensorInfo]


class _GPTQ:
    """Linears without a 16-bit weight; `X.weight` (out, in) is decoded from `X.*` to bf16."""

    PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, tensors: Tensors, settings: Mapping[str, Any]) -> None:
        self._tensors, self._settings = tensors, settings
        ends = self.PARTS[0]
        linears = [name.removesuffix(ends) for name in tensors if name.endswith(ends)]
        self.codes = {f"{linear}{WEIGHT}": f"{linear}{ends}" for linear in linears}
        self.hidden = {f"{linear}{part}" for linear in linears for part in self.PARTS}
        _check_complete(tensors, linears, self.PARTS[1:3])

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
        bits = packed.shape[0] * 32 // inputs  # a module's bits may differ from config.json's
        if bits not in GPTQ_BITS or len(packed) != -(-inputs * bits // 32):
            raise UserError(
                f"{linear}.qweight has {len(packed) * 32 / inputs:.3g} bits a weight; "
                f"{', '.join(map(str, GPTQ_BITS))} can be read. Set model.source to the original "
                "bf16, fp16 or fp32 checkpoint."
            )
        codes = _unpacked(packed.T, bits)[:, :inputs]
        stored_zeros = read(f"{linear}.qzeros")
        if setting_value(self._settings, FORMAT_NAMES["gptq"], "gptq") == "gptq":
            stored_zeros = stored_zeros + sum(1 << shift for shift in range(0, 32, bits))
        zeros = _unpacked(stored_zeros, bits)
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
            _unpacked(read(f"{linear}{part}"), 4, order=AWQ_ORDER)
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
        _check_complete(tensors, linears, (".weight_scale",))

    def _parts(self, linear: str) -> list[str]:
        ends = ("scale", "zero_point", "shape", "g_idx", "global_scale")
        return [name for end in ends if (name := f"{linear}.weight_{end}") in self._tensors]

    def shape(self, name: str, read: Read) -> tuple[int, ...]:
        stored, shape = self.codes[name], f"{name}_shape"
        if shape in self._tensors:
            return tuple(read(shape).tolist())
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


def packed_linears(
    tensors: Tensors, settings: Mapping[str, Any]
) -> "_GPTQ | _CompressedTensors | None":
    """Return the packed linears of `quantization_config`; None: another format."""
    kinds: dict[str, type[_GPTQ] | type[_CompressedTensors]] = {
        "gptq": _GPTQ,
        "awq": _AWQ,
        "compressed-tensors": _CompressedTensors,
    }
    kind = kinds.get(settings.get(METHOD, ""))
    return None if kind is None else kind(tensors, settings)


def _check_complete(tensors: Tensors, linears: list[str], parts: tuple[str, ...]) -> None:
    """Raise `UserError` for a packed linear without all tensors that decoding needs."""
    missing = [f"{x}{part}" for x in linears for part in parts if f"{x}{part}" not in tensors]
    if missing:
        raise UserError(
            f"{missing[0]} is missing: packed weights cannot be decoded without it. Complete "
            "the download, or set model.source to the original bf16, fp16 or fp32 checkpoint."
        )


def _unpacked(
    packed: torch.Tensor, bits: int, *, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the codes (rows, columns * 32 / bits) of int32, lowest bits first; order: places
    of the codes in an int32."""
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32)
    codes: torch.Tensor = (packed.unsqueeze(-1) >> (shifts * bits)) & (2**bits - 1)
    return codes.flatten(-2)


# E2M1 by code: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_BLOCK = 32
EXPONENT_BIAS = 127


def decode_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_size: tuple[int, int] | None,
    *,
    first_row: int = 0,
) -> torch.Tensor:
    """Return rows of a weight (..., rows, in) in bf16, multiplied in fp32. scale: of the whole
    weight; block_size: None for one scale; first_row: of `weight` in the whole."""
    factors = scale.float()
    if block_size is not None:
        rows = torch.arange(first_row, first_row + weight.shape[-2]) // block_size[0]
        columns = torch.arange(weight.shape[-1]) // block_size[1]
        factors = factors[..., rows, :][..., columns]
    return (weight.float() * factors).to(torch.bfloat16)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return experts (experts, in, out) in bf16 of blocks (experts, out, in / 32, 16) and scales
    (experts, out, in / 32), both uint8. Exact: bf16 has all of these values."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1)[codes.int()]
    exponents = scales.int().unsqueeze(-1) - EXPONENT_BIAS
    return torch.ldexp(values, exponents).flatten(-2).to(torch.bfloat16).mT.contiguous()


NF4_STATE = ".quant_state.bitsandbytes__nf4"
NF4_PARTS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", NF4_STATE)
FP8_SCALE, MX_BLOCKS, MX_SCALES = "_scale_inv", "_blocks", "_scales"
# Of activations, which the workflow computes in 16 bits.
ACTIVATION_SCALES = (
    ".activation_scale",
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite. Their bounds keep NaN, and take a 20th of `isfinite`'s time on
    a CPU."""
    return not tensor.numel() or all(map(math.isfinite, tensor.aminmax()))


class DecodedReader(CheckpointReader):
    """`CheckpointReader` that decodes packed weights. finite: of a stage that keeps what it reads:
    `UserError` for infinity and NaN, and files are hashed."""

    def __init__(
        self,
        folder: Path,
        tensors: Tensors,
        quantization: Mapping[str, Any],
        *,
        recorded: Iterable[RecordedFile] = (),
        finite: bool = False,
    ) -> None:
        """tensors: of `loaded_tensors`; quantization: settings of config.json, or {}."""
        self._tensors, self.quantization = tensors, quantization
        shards = {name: tensor.file for name, tensor in tensors.items()}
        super().__init__(folder, shards=shards, recorded=recorded, hashed=finite)
        self._finite = finite
        stored = self._shards.keys()
        self._fp8 = {
            name.removesuffix(FP8_SCALE)
            for name in stored
            if name.endswith(FP8_SCALE) and name.removesuffix(FP8_SCALE) in stored
        }
        self._mxfp4 = {
            name.removesuffix(MX_BLOCKS)
            for name in stored
            if name.endswith(MX_BLOCKS) and name.removesuffix(MX_BLOCKS) + MX_SCALES in stored
        }
        self._nf4 = {name.removesuffix(NF4_STATE) for name in stored if name.endswith(NF4_STATE)}
        self._block_size = _block_size(quantization) if self._fp8 else None
        self._linears = packed_linears(tensors, quantization)
        hidden = {f"{name}{FP8_SCALE}" for name in self._fp8}
        hidden |= {f"{name}{suffix}" for name in self._mxfp4 for suffix in (MX_BLOCKS, MX_SCALES)}
        hidden |= {f"{name}{suffix}" for name in self._nf4 for suffix in NF4_PARTS[1:]}
        if self._linears is not None:
            hidden |= self._linears.hidden
        if self._fp8 or self._linears is not None:
            hidden |= {name for name in stored if name.endswith(ACTIVATION_SCALES)}
        self._files_of = {n: file for n, file in self._shards.items() if n not in hidden}
        self._files_of |= {name: self._shards[f"{name}{MX_BLOCKS}"] for name in self._mxfp4}
        self._files_of |= {name: self._shards[codes] for name, codes in self._codes.items()}

    @property
    def packed(self) -> set[str]:
        """Names of the weights that are decoded."""
        return self._fp8 | self._mxfp4 | self._nf4 | self._codes.keys()

    @property
    def _codes(self) -> dict[str, str]:
        return {} if self._linears is None else self._linears.codes

    def in_few_bits(self, name: str) -> bool:
        """Whether a weight is stored in less than 8 bits: in 8 its codes have its own name."""
        return name in self._nf4 | self._mxfp4 or self._codes.get(name, name) != name

    def __contains__(self, name: str) -> bool:
        return name in self._files_of

    def names(self) -> list[str]:
        """Return the names of all tensors, in order of shard and name."""
        return sorted(self._files_of, key=lambda name: (self._files_of[name], name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        if (state := self.nf4_state(name)) is not None:
            return tuple(state["shape"])
        if name in self._mxfp4:
            experts, out_features, blocks, _ = self._tensors[f"{name}{MX_BLOCKS}"].shape
            return experts, blocks * MX_BLOCK, out_features
        if self._linears is not None and name in self._codes:
            return self._linears.shape(name, super().tensor)
        return self._tensors[name].shape if name in self._tensors else super().shape(name)

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's type when it is read, without reading it."""
        if name in self.packed:
            return "BF16"
        return self._tensors[name].dtype if name in self._tensors else super().dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        if name in self.packed:
            return self.rows(name, 0, self.shape(name)[0])
        return self._checked(name, super().tensor(name))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of dim 0; reads and decodes only these."""
        return self._checked(name, self._rows(name, start, stop), first_row=start)

    def _checked(self, name: str, tensor: torch.Tensor, *, first_row: int = 0) -> torch.Tensor:
        """Return a tensor, or rows of it; raises `UserError` for a value that is not finite."""
        if not self._finite or not tensor.is_floating_point() or is_finite(tensor):
            return tensor
        wrong = (~tensor.isfinite()).nonzero()
        index = [int(x) for x in wrong[0]]
        value = float(tensor[tuple(index)])
        if index:
            index[0] += first_row
        raise UserError(
            f"{self.folder / self._files_of[name]}: {name}{index} is {value} ({len(wrong):,} of "
            f"{tensor.numel():,} values that were read with it are no finite numbers). "
            "Download or export the model again, or choose another model.source."
        )

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._mxfp4:
            parts = (super(DecodedReader, self).rows(f"{name}{s}", start, stop)
                     for s in (MX_BLOCKS, MX_SCALES))  # fmt: skip
            return decode_mxfp4(*parts)
        if name in self._nf4:
            weight = decoded(*self.nf4_weight(name)).to(torch.bfloat16)
            return weight[start : max(start, stop)]
        if self._linears is not None and name in self._codes:
            whole = self._linears.decoded(name, super().tensor)
            return whole[start : max(start, stop)]
        weight = super().rows(name, start, stop)
        if name not in self._fp8:
            return weight
        scale = super().tensor(f"{name}{FP8_SCALE}")
        if weight.dim() == 3:  # a stack, of which each expert has scales of its own
            scale = scale[start : max(start, stop)] if scale.dim() == 3 else scale
            return decode_fp8(weight, scale, self._block_size)
        return decode_fp8(weight, scale, self._block_size, first_row=start)

    def nf4_state(self, name: str) -> dict[str, Any] | None:
        """Return bitsandbytes' JSON on a weight in NF4, as stored; None for another."""
        if name not in self._nf4:
            return None
        state: dict[str, Any] = unpack_tensor_to_dict(super().tensor(f"{name}{NF4_STATE}"))
        return state

    def nf4_parts(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return an NF4 weight's tensors by suffix, bytes unchanged, codes (bytes, 1), or None."""
        if name not in self._nf4:
            return None
        stored = {suffix: f"{name}{suffix}" for suffix in NF4_PARTS}
        parts = {
            f"weight{suffix}": self._checked(name, super(DecodedReader, self).tensor(part))
            for suffix, part in stored.items()
            if part in self._shards
        }
        return parts | {"weight": parts["weight"].contiguous().view(torch.uint8).view(-1, 1)}

    def nf4_weight(self, name: str) -> tuple[torch.Tensor, QuantState]:
        """Return codes (bytes, 1) and state of a weight in NF4, on the CPU; it decodes to fp32."""
        parts = self.nf4_parts(name)
        assert parts is not None, f"{name} is in NF4"
        packed = parts.pop("weight")
        named = {part.removeprefix("weight."): tensor for part, tensor in parts.items()}
        state = QuantState.from_dict(named, device=torch.device("cpu"))
        state.dtype = torch.float32
        return packed, state


def _block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of one scale; None for a whole tensor."""
    size = quantization.get("weight_block_size")
    return None if size is None else (int(size[0]), int(size[1]))
