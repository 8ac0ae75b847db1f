"""`convert_gguf/gguf.json`, written by `evaluation.gguf_checks`."""

from workflow.lib.artifacts.records import Provenance, Record


class GgufFile(Record):
    """A GGUF file, as llama.cpp runs it, beside the merged model in Transformers."""

    file: str
    """Its name."""
    bytes: int
    """Its size."""
    loss: float
    """Nats per token that llama.cpp gives the compared positions."""
    reference_loss: float
    """What Transformers gives them with the merged model, in float32."""
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

    files: dict[str, GgufFile]
    """By format."""
    prompts: int
    """Conversations and texts whose token ids are equal in llama.cpp and in Transformers."""
    modelfile: bool
    """Whether the chat template could be written for Ollama."""
    provenance: Provenance
    """What made the file."""
