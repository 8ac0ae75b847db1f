"""`convert_gguf/gguf.json`, written by `convert_gguf`."""

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.settings.evaluate import GgufFormat


class GgufFile(Record):
    """A GGUF file, as llama.cpp runs it, beside the same model in Transformers."""

    form: str
    """`merged`: the merged model; `adapter`: the base, over which the adapter's file is loaded."""
    format: GgufFormat  # how its weights are stored
    file: str  # its name
    bytes: int  # its size
    adapter: str | None  # name of the adapter's file; None for the merged model
    adapter_bytes: int | None  # its size
    prompts: int
    """Conversations and texts whose token ids are equal in llama.cpp and in Transformers."""
    loss: float  # nats per token that llama.cpp gives the compared tokens
    reference_loss: float  # what Transformers gives them, in float32
    bound: float  # largest difference of the two that is allowed in this format
    tokens: int  # tokens of held-out documents compared
    answers: int  # held-out prompts answered greedily by both
    equal_answers: int  # answers that are the same, token by token


class GgufChecks(Record):
    """`convert_gguf/gguf.json`."""

    files: list[GgufFile]  # each form in each format
    provenance: Provenance  # what made the file
