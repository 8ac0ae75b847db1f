"""A model's folder as one object: config, names of tensors, class without weights, readers.

A folder is read at first use, and once. So who opens a model passes it on as a `Checkpoint`, and
nobody asks the folder again. `check_loading` compares it with Transformers' own loading: the
family's `from_pretrained` gets meta tensors and reports missing, misshapen and unused ones."""

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import _get_resolved_checkpoint_files

from workflow.lib.checkpoints.converted_reader import ConvertedReader, ModuleNames
from workflow.lib.checkpoints.decoded_reader import DecodedReader
from workflow.lib.checkpoints.decoder_layers import ExpertStack, decoder_layers, other_parts
from workflow.lib.checkpoints.files.attention_needs import attention_needs
from workflow.lib.checkpoints.files.config_file import read_bounded
from workflow.lib.checkpoints.files.model_files import (
    CONFIG,
    WEIGHTS,
    fault_of_files,
    named_weights,
)
from workflow.lib.checkpoints.files.quantization_settings import (
    QUANTIZATION,
    TEXT_PART,
    quantization_of,
    quantization_settings,
    without_quantization,
)
from workflow.lib.checkpoints.files.safetensors_headers import (
    FLOAT_BYTES,
    INDEX,
    SINGLE,
    TensorInfo,
    read_headers,
    read_index,
)
from workflow.lib.checkpoints.meta_model import (
    build_config_on_meta,
    drop_no_attention_,
    is_tied,
    quiet_transformers,
    return_states_alone_,
    said_by,
)
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.kernels.attention.attention_choice import AttentionNeeds
from workflow.lib.system.checksums import (
    RecordedFile,
    check_files,
    downloaded_files,
    without_weights,
)
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.undocumented_interfaces import check_interfaces

TIE = "tie_word_embeddings"


class Checkpoint:
    """A folder with a model: published, merged, or an NF4 base (`is_nf4`)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config_path = folder, folder / CONFIG
        self._untied: bool | None = None  # whether tables differ that the class ties

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Return the published model in a folder. Raises `UserError` for files that are missing,
        broken, or not as their record says (of weights the headers are read alone), a config.json
        out of bounds, and a quantization that cannot be decoded."""
        checkpoint = cls(folder)
        check_files(without_weights(checkpoint.recorded))
        assert checkpoint.tensors
        without_quantization(checkpoint.config, checkpoint.config_path)
        return checkpoint

    @cached_property
    def files(self) -> list[Path]:
        """The files of weights that Transformers reads, in its order."""
        return loaded_files(self.folder)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Type, shape and file of each tensor that Transformers reads, by stored name."""
        return loaded_tensors(self.folder)

    @cached_property
    def recorded(self) -> list[RecordedFile]:
        """The files of a download with the SHA-256 of its record; none for a user's own folder."""
        return downloaded_files(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The stored config.json, its sizes in bounds; never change it."""
        return read_bounded(self.config_path, constant=float)

    @property
    def stated_quantization(self) -> dict[str, Any]:
        """What config.json says of quantization, true or not; {} for nothing."""
        return quantization_settings(self.config) or {}

    @cached_property
    def is_packed(self) -> bool:
        """Whether weights are packed, whatever config.json says."""
        return quantization_of(self.config, self.config_path) is not None

    @property
    def is_nf4(self) -> bool:
        """Whether the engine trains on the stored bytes."""
        return self.is_packed and bool(self.stated_quantization.get("load_in_4bit"))

    @cached_property
    def plain_config(self) -> dict[str, Any]:
        """The config.json of a copy with decoded weights: without quantization, tied as this model
        is. Never change it."""
        config = without_quantization(self.config, self.config_path)
        config.pop(WEIGHTS, None)  # a file that the copy has not
        if config.get(TIE) is not False and not is_tied(self.model):
            part = config.get(TEXT_PART)
            config |= {TIE: False} | ({TEXT_PART: part | {TIE: False}} if part else {})
        return config

    @cached_property
    def attention_needs(self) -> AttentionNeeds:
        """The model's attention needs, defaults of its class included."""
        config, kind = self.config, self.config.get("model_type")
        if kind is not None and kind in CONFIG_MAPPING:
            whole = CONFIG_MAPPING[kind].from_pretrained(self.folder, local_files_only=True)
            config = whole.to_dict()
        return attention_needs(config)

    @property
    def vocabulary_size(self) -> int:
        return int(self.transformers_config().get_text_config().vocab_size)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, a new one at each call; raises as `load_tokenizer`."""
        return load_tokenizer(self.folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model without values, in bf16; never change it (`build` makes another one)."""
        return self.build(torch.bfloat16)

    @cached_property
    def names(self) -> ModuleNames:
        return ModuleNames(self.model)

    @property
    def stacks(self) -> dict[str, ExpertStack]:
        """The stacks of experts by the path of their parameter."""
        return self.names.stacks

    @cached_property
    def other_parts(self) -> list[str]:
        """Paths of the parts that text never passes."""
        return other_parts(self.model)

    def stored(self, *, recorded: bool = False) -> CheckpointReader:
        """Open the tensors as they are stored; recorded: compare each file with its record."""
        return CheckpointReader(self.folder, recorded=self.recorded if recorded else ())

    def decoded(self) -> DecodedReader:
        """Open the tensors in 16 bits, by stored names."""
        return DecodedReader(self.folder, self.tensors, self.stated_quantization)

    def weights(self, *, recorded: bool = False, finite: bool = False) -> ConvertedReader:
        """Open the tensors in 16 bits, by names of the modules; finite: refuse infinity and NaN,
        and hash files without a record."""
        return ConvertedReader(
            self.folder,
            self.tensors,
            self.stated_quantization,
            self.names,
            recorded=self.recorded if recorded else (),
            finite=finite,
        )

    def reader(self) -> CheckpointReader:
        """Open the tensors that the engine holds: NF4 as stored, all else as `weights`."""
        return self.stored() if self.is_nf4 else self.weights()

    def build(
        self, dtype: torch.dtype, *, attention: str = "eager", attention_dropout: bool = True
    ) -> PreTrainedModel:
        """Build the causal LM that Transformers loads from here, without memory, in `dtype`.

        Embedding and head are tied as it ties them; its configuration has quantization settings
        only where weights are packed. A config.json alone is enough. attention: `eager`, which
        every family has, unless the model is to compute. attention_dropout: whether training drops
        attention weights as the family does. Raises `UserError` if Transformers knows no such
        model, it needs code from the folder, or the family lacks the attention."""
        try:
            config = self.transformers_config()
            return_states_alone_(config)
            if not attention_dropout:
                drop_no_attention_(config)
            if self._untied is None:
                model = build_config_on_meta(config, dtype=dtype, attention=attention)
                self._untied = self._tied_tables_differ(model)
                if not self._untied:
                    return model
            if self._untied:
                for part in (config, config.get_text_config()):
                    part.tie_word_embeddings = False
            return build_config_on_meta(config, dtype=dtype, attention=attention)
        except UserError:  # a ValueError too
            raise
        except (ValueError, KeyError, OSError) as error:
            if "trust_remote_code" in str(error):
                raise UserError(
                    f"{self.config_path} describes a model that is code of its own repository, "
                    "which is never run. Choose a model.source that Transformers knows."
                ) from None
            raise UserError(
                f"{self.config_path} does not describe a causal language model that Transformers "
                f"can build with {attention} attention ({error}). Check model.source and "
                "model.attention."
            ) from None

    def transformers_config(self) -> PretrainedConfig:
        """Return the configuration as Transformers completes it, a new one at each call."""
        config: PretrainedConfig = AutoConfig.from_pretrained(
            self.folder, local_files_only=True, trust_remote_code=False
        )
        if not self.is_packed:
            for part in (config, config.get_text_config()):
                part.__dict__.pop(QUANTIZATION, None)
        return config

    def _tied_tables_differ(self, model: PreTrainedModel) -> bool:
        """Tell whether two tables that the class ties are stored with other values: Transformers
        compares them too, and does not tie them then."""
        if not model.all_tied_weights_keys or not any(self.folder.glob("*.safetensors")):
            return False
        names = ModuleNames(model)
        with self.decoded() as reader:
            stored = {names.of(name): name for name in reader.names()}
            return any(
                first in stored
                and second in stored
                and not reader.equals(stored[first], reader, stored[second])
                for first, second in model.all_tied_weights_keys.items()
            )


def loaded_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Return every tensor that Transformers reads of a folder, by stored name. Raises `UserError`
    if safetensors are absent, missing, broken, or do not belong together."""
    files = loaded_files(folder)
    tensors = read_headers(files)
    index = folder / (named_weights(folder) or INDEX)
    if index.suffix == ".json" and files != [folder / SINGLE]:
        _check_index(index, tensors)
    return tensors


def _check_index(index: Path, tensors: dict[str, TensorInfo]) -> None:
    """Raise `UserError` unless each tensor is read from its file in the index."""
    for name, file in read_index(index).items():
        if name not in tensors:
            held = "but it does not"
        elif tensors[name].file != file:
            held = f"but Transformers takes that of {tensors[name].file}, which has one too"
        else:
            continue
        raise UserError(
            f"{index} says that {file} holds {name!r}, {held}. The files do not belong together: "
            "download them again."
        )


def loaded_files(folder: Path) -> list[Path]:
    """Return the safetensors files that Transformers reads of a model's folder, in its order: the
    last file with a tensor counts. Raises `UserError` as `loaded_tensors`."""
    check_interfaces("transformers")
    named = named_weights(folder)
    fault = fault_of_files({path.name for path in folder.glob("*")}, named_weights=named)
    if fault is not None:
        raise setting_error("model.source", str(folder), *fault)
    if named is None and not (folder / SINGLE).is_file():
        read_index(folder / INDEX)  # within bounds, before Transformers does
    try:
        files, _ = _get_resolved_checkpoint_files(
            str(folder),
            variant=None,
            gguf_file=None,
            use_safetensors=True,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=named,
            download_kwargs={"local_files_only": True},
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder}: Transformers {transformers.__version__} finds no weights in it "
            f"({error!r}). Complete the download, or check model.source."
        ) from None
    return [Path(file) for file in files or ()]


# Keys of config.json for the layers of multi-token prediction after the decoder layers.
EXTRA_LAYERS = (
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
    "mtp_num_hidden_layers",
)
NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class LeftOver:
    """Tensors that Transformers does not load."""

    stored: tuple[str, ...]  # names of all such tensors in the checkpoint
    unexpected: tuple[str, ...]
    """Of these, the tensors that the family does not list as ignored, by Transformers' names."""


def check_loading(reader: ConvertedReader) -> LeftOver:
    """Return the tensors that Transformers does not load; raise `UserError` unless it loads every
    tensor of the model in its shape and a quantizable type. Reads headers alone."""
    reader.check_parts()
    model = reader.module_names.model
    if reader.packed and not reader.quantization:
        raise UserError(
            f"{reader.folder}: {min(reader.packed)} is packed, but config.json says nothing of it "
            f"({QUANTIZATION}), so Transformers would take its codes for weights. The files do not "
            "belong together: check model.source."
        )
    report = _report(model, reader)
    tensors = model.state_dict()
    owned = [name for name in tensors if reader.module_names.owner(name) == name]
    missing = sorted({name for name in owned if name not in reader} | report["missing_keys"])
    if missing:
        others = f", but {len(reader.left)} others ({reader.left[0]} first)" if reader.left else ""
        raise UserError(
            f"{reader.folder}: the checkpoint has no tensor {missing[0]}, nor {len(missing) - 1} "
            f"more that the model of its config.json has{others}. The files do not belong "
            "together, or the download is not complete: check model.source."
        )
    if divided := reader.divided(other_parts(model)):
        raise UserError(
            f"{reader.folder}: model_type = {model.config.model_type!r}: its files keep {divided} "
            "and other weights of the decoder in one tensor, which this workflow cannot write back "
            "in parts. Choose another model.source."
        )
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{reader.folder}: {name} has shape {[*stored]}, but config.json says {[*expected]}. "
            "The files do not belong together: check model.source."
        )
    for name in owned:
        dtype = reader.dtype(name)
        if tensors[name].is_floating_point() and dtype not in FLOAT_BYTES:
            raise UserError(
                f"{reader.folder}: {name} is stored as {dtype}, which is neither bf16, fp16 nor "
                "fp32, nor a format that is decoded. Set model.source to the original bf16, fp16 "
                "or fp32 checkpoint."
            )
    _check_no_more_layers(model, report["unexpected_keys"], reader.folder)
    return LeftOver(stored=tuple(reader.left), unexpected=tuple(sorted(report["unexpected_keys"])))


def _report(model: PreTrainedModel, reader: ConvertedReader) -> dict[str, Any]:
    """Return Transformers' report on loading tensors of these names and shapes."""
    config = copy.deepcopy(model.config)
    for part in (config, config.get_text_config()):
        part.__dict__.pop(QUANTIZATION, None)  # they have the names that they are decoded to
    stored = {
        name: torch.empty(shape, device="meta", dtype=torch.bfloat16)
        for name, shape in reader.stored_shapes().items()
    }
    try:
        with quiet_transformers():
            loaded: Any = type(model).from_pretrained(
                None,
                config=config,
                state_dict=stored,
                dtype=torch.bfloat16,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"{reader.folder}: Transformers {transformers.__version__} cannot load the checkpoint "
            f"into the model of its config.json ({said_by(error)}). The files do not belong "
            "together: check model.source."
        ) from None
    report: dict[str, Any] = loaded[1]
    return report


def first_weight(model: PreTrainedModel) -> str:
    """Return the name of the first weight of the decoder layers with two dimensions or more."""
    (first, *_) = decoder_layers(model)
    (path,) = (path for path, module in model.named_modules() if module is first)
    return next(f"{path}.{name}" for name, x in first.named_parameters() if x.dim() > 1)


def _check_no_more_layers(model: PreTrainedModel, reported: Iterable[str], folder: Path) -> None:
    """Raise `UserError` for extra decoder layers that family and config.json do not know."""
    layers = decoder_layers(model)
    first = next(path for path, module in model.named_modules() if module is layers[0])
    start = first.rpartition(".")[0] + "."
    rests = (name.removeprefix(start).split(".")[0] for name in reported if name.startswith(start))
    numbers = [int(number) for number in rests if NUMBER.fullmatch(number)]
    config: Any = model.config.get_text_config()
    extra = max(int(getattr(config, key, None) or 0) for key in EXTRA_LAYERS)
    beyond = [number for number in numbers if number >= len(layers) + extra]
    if beyond:
        raise UserError(
            f"{folder}: the checkpoint has decoder layer {max(beyond)}, but config.json says "
            f"num_hidden_layers = {len(layers)}. The files do not belong together: check "
            "model.source."
        )
