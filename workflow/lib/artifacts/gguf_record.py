"""`convert_gguf/gguf.json`, written by `evaluation.gguf_checks`."""

from workflow.lib.artifacts.records import Provenance, Record


class GgufFile(Record):
    """A GGUF file, as llama.cpp runs it, beside the same model in Transformers."""

    form: str
    """`merged`: the merged model; `adapter`: the base, over which the adapter's file is loaded."""
    format: str
    """How its weights are stored."""
    file: str
    """Its name."""
    bytes: int
    """Its size."""
    adapter: str | None
    """Name of the adapter's file; None for the merged model."""
    adapter_bytes: int | None
    """Its size."""
    prompts: int
    """Conversations and texts whose token ids are equal in llama.cpp and in Transformers."""
    loss: float
    """Nats per token that llama.cpp gives the compared positions."""
    reference_loss: float
    """What Transformers gives them, in float32."""
    bound: float
    """Largest difference of the two that is allowed in this format."""
    positions: int
    """Positions of held-out documents compared."""
    same_most_likely: float
    """Share of them with the same most likely token."""
    answers: int
    """Held-out prompts answered greedily by both."""
    equal_answers: int
    """Answers that are the same, token by token."""


class GgufChecks(Record):
    """`convert_gguf/gguf.json`."""

    files: list[GgufFile]
    """Each form in each format."""
    provenance: Provenance
    """What made the file."""
