"""The forms of a model, from the original to the exported ones.

Settings, rules, evaluation, report, card and publishing follow `FORMS`: another form is a row, and
what makes it. A form is weights in a folder (`weights`), some with an adapter's folder on them
(`adapter`). Folders of no form's own: `model` (the original), `base` (its NF4 base), `adapter` (the
trained one), `start` (the one that training started from)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple


class Hub(NamedTuple):
    """A form in a repository of the Hugging Face hub, which `model` describes on its card."""

    relation: Literal["finetune", "quantized"]  # to the base
    library: str  # loads it
    model: str


@dataclass(frozen=True)
class Export:
    """A form that the setting of its name in `export` makes, in a folder below the run's."""

    folder: str
    hub: Hub
    made_of: str | None = None  # another form; None: of the adapter and its base


@dataclass(frozen=True)
class Form:
    """A form: its name and meaning for people, and where its weights lie."""

    label: str
    meaning: str
    weights: str
    adapter: Literal["adapter", "start"] | None = None
    mark: tuple[str, str] | None = None
    """Colour and symbol in figures; None: Transformers and PEFT do not open it."""
    export: Export | None = None
    vllm: tuple[str, ...] = ()  # compute dtypes in which vLLM serves it
    gguf: Literal["merged", "adapter"] | None = None
    """Content of the GGUF files (`export.gguf_of`) by which llama.cpp serves it."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its folders: of the weights, and of an adapter."""
        return (self.weights, self.adapter) if self.adapter else (self.weights,)

    @property
    def trained(self) -> bool:
        """Whether it holds what was trained."""
        return self.adapter == "adapter" or self.export is not None

    def served_by(self, server: str) -> bool:
        return bool(self.vllm) if server == "vllm" else self.gguf is not None


PLAIN_DTYPES = ("float32", "bfloat16", "float16")  # of models in 16 bits
# In display order; each is compared with those before it.
FORMS = {
    "original": Form(
        "original",
        "the model before quantization, in 16 bits",
        weights="model",
        mark=("muted", "diamond-open"),
    ),
    "base": Form(
        "NF4 base",
        "the same as it was trained on, in 4 bits (NF4) or in 16",
        weights="base",
        mark=("muted", "circle-open"),
    ),
    "start": Form(
        "start",
        "the adapter that training started from, on the base of the training",
        weights="base",
        adapter="start",
        mark=("series-4", "star"),
    ),
    "tuned": Form(
        "tuned",
        "the adapter on the base of the training",
        weights="base",
        adapter="adapter",
        mark=("series-1", "circle"),
    ),
    "tuned_on_original": Form(
        "tuned on original",
        "the adapter on the original",
        weights="model",
        adapter="adapter",
        mark=("series-2", "square"),
        vllm=PLAIN_DTYPES,
        gguf="adapter",
    ),
    "merged": Form(
        "merged",
        "one model with the adapter in its weights, in 16 bits",
        weights="merged",
        mark=("series-3", "diamond"),
        export=Export(
            "consolidate/merged",
            Hub("finetune", "transformers", "the merged model: base and adapter in one, bfloat16"),
        ),
        vllm=PLAIN_DTYPES,
        gguf="merged",
    ),
    "w4a16": Form(
        "merged in 4 bits",
        "the merged model in 4 bits (W4A16), as vLLM serves it",
        weights="w4a16",
        mark=("series-5", "hexagon"),
        export=Export(
            "convert_merged/w4a16",
            Hub("quantized", "transformers", "the merged model in 4 bits (compressed-tensors)"),
            made_of="merged",
        ),
        vllm=("bfloat16", "float16"),
    ),
    "gguf": Form(
        "GGUF",
        "the merged model, or adapter and original, in files of llama.cpp",
        weights="gguf",
        export=Export(
            "convert_gguf",
            Hub("quantized", "gguf", "GGUF files, for llama.cpp and Ollama"),
            made_of="merged",  # or of the adapter alone (`export.gguf_of`)
        ),
    ),
}
EXPORTS = {name: form.export for name, form in FORMS.items() if form.export is not None}
# The forms that an evaluation may measure, and those that it may judge as the served one.
SUBJECTS = tuple(name for name, form in FORMS.items() if form.mark is not None)
TRAINED = tuple(name for name in SUBJECTS if FORMS[name].trained)
# The other formats of the merged model that Transformers opens.
CONVERTED = tuple(name for name in SUBJECTS if name in EXPORTS and EXPORTS[name].made_of)
# References of gains: the first measured one.
REFERENCES = ("original", "base")
# The folders that hold forms, by name.
FOLDERS = ("model", "base", "adapter", "start", *EXPORTS)

if TYPE_CHECKING:
    SubjectName = str
    Served = str
    HubForm = str
else:
    SubjectName = Literal[*SUBJECTS]
    Served = Literal[*TRAINED]
    HubForm = Literal["adapter", *EXPORTS]
