"""The attention of `auto`, by a model's needs, a device's capabilities and packages; without torch.

Preflight calls this for a machine that may not be available, training and evaluation for their own
device (`model.backends`)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

FLASH, VARLEN, FLEX = "flash_attention_2", "varlen", "flex"
RECORDED_FLASH = "varlen_recorded"  # of recordings, in place of a package
FAMILY = "family"  # the model family's own
FLEX_BLOCK = 128  # tokens of a block of flex's masks, as in torch
OWN_SCORES = "this model's layers compute their scores themselves"
WIDEST_HEAD = 256  # of FlashAttention 2, and of flex_attention's blocks in a GPU's shared memory
WIDEST_KERNEL_HEAD = 512  # of kernels of ours (`kernels.attention.document_attention`)


@dataclass(frozen=True)
class AttentionNeeds:
    """A model's attention beyond order, documents and sliding windows."""

    softcap: bool = False  # it soft-caps its scores (Gemma 2)
    sinks: bool = False  # a learned score per head takes its share of the weights (gpt-oss)
    chunks: bool = False  # some layers see no further than their chunk of a document (Llama 4)
    head_dim: int = 128  # the widest of its queries and keys
    value_dim: int = 128
    dropout: float = 0.0  # share of attention weights that training drops
    masked: bool = False  # its layers separate documents by the mask alone
    masks_of_rows: bool = False  # its masks of packed rows ignore documents' starts
    eager_alone: bool = False
    """Its layers compute all scores themselves: no other implementation serves it."""
    no_sdpa: bool = False  # its class excludes sdpa
    rows_shared: bool = False  # processes share rows, and exchange heads

    @property
    def stock(self) -> str:
        """The attention of stock Transformers that computes the family's function."""
        return "eager" if self.softcap or self.sinks or self.no_sdpa else "sdpa"

    def with_dropout(self, attention_dropout: str | int) -> "AttentionNeeds":
        """Return the needs of a training with this `model.attention_dropout`."""
        return self if attention_dropout == FAMILY else replace(self, dropout=0.0)

    def over(self, context_parallel: int) -> "AttentionNeeds":
        """Return the needs where so many processes share a row."""
        return replace(self, rows_shared=context_parallel > 1)

    def dropout_note(self, attention_dropout: str | int) -> str | None:
        """Return the note on a training that drops less than the family does; None for nothing."""
        if self.dropout == self.with_dropout(attention_dropout).dropout:
            return None
        return (
            f"attention dropout: none (model.attention_dropout: {attention_dropout}), where the "
            f"model's family drops {self.dropout:g} of the weights; {FAMILY} would, which neither "
            "varlen nor flex can do"
        )

    def obstacle(self, name: str) -> str | None:
        """Return the need that an implementation lacks on any device; None if it lacks none."""
        if name in (VARLEN, FLEX):
            return self.varlen_obstacle() if name == VARLEN else self.flex_obstacle()
        if self.rows_shared:
            return "it cannot exchange heads (hardware.context_parallel); varlen and flex can"
        if name.startswith("flash"):
            return self.flash_obstacle()
        if name == "sdpa" and self.softcap:
            return "it ignores the soft-capping of attention scores that this model has"
        if name == "sdpa" and self.sinks:
            return "it ignores the attention sinks that this model has"
        if name == "sdpa" and self.no_sdpa:
            return "the class of this model rules it out"
        return None

    def varlen_obstacle(self) -> str | None:
        if self.softcap:
            return "it cannot soft-cap attention scores, as this model does"
        if self.value_dim != self.head_dim:
            return (
                f"it wants values as wide as keys, and this model's are {self.value_dim} and "
                f"{self.head_dim}"
            )
        return (
            self._bounds_obstacle()
            or self._packed_obstacle()
            or self._width_obstacle(WIDEST_KERNEL_HEAD)
        )

    def flash_obstacle(self) -> str | None:
        return (
            self._bounds_obstacle() or self._masked_obstacle() or self._width_obstacle(WIDEST_HEAD)
        )

    def flex_obstacle(self) -> str | None:
        if self.eager_alone:
            return OWN_SCORES
        return self._packed_obstacle() or self._width_obstacle(WIDEST_HEAD)

    def _bounds_obstacle(self) -> str | None:
        """Needs beyond the bounds of documents and a window, if any."""
        if self.eager_alone:
            return OWN_SCORES
        if self.sinks:
            return "it has no attention sinks, as this model has"
        return "it has no chunks, as this model's attention has" if self.chunks else None

    def _masked_obstacle(self) -> str | None:
        if self.masked:
            return "it gets no mask, and this model's layers tell of documents by nothing else"
        return None

    def _packed_obstacle(self) -> str | None:
        if masked := self._masked_obstacle():
            return masked
        if self.dropout > 0:
            return (
                "it cannot drop attention weights, and this model's attention_dropout is "
                f"{self.dropout:g} (model.attention_dropout: 0 leaves it out)"
            )
        return None

    def _width_obstacle(self, widest: int) -> str | None:
        if self.head_dim > widest:
            return f"its heads are {widest} wide at most, and this model's {self.head_dim}"
        return None


BY_SETTING = "model.attention asks for it"


class AttentionChoice(NamedTuple):
    name: str
    reason: str


def attention_obstacle(
    name: str, needs: AttentionNeeds, *, cuda: bool, bfloat16: bool, compute_dtype: str
) -> str | None:
    """Return why a named attention cannot run, apart from packages and kernels; None if it can."""
    if name == VARLEN or name.startswith("flash"):
        if not cuda:
            return "it needs a GPU, and this runs on cpu"
        if compute_dtype == "float32":
            return "it computes in 16 bits, and compute_dtype is float32"
        if not bfloat16:
            return "it needs a GPU of compute capability 8.0 or more"
    return needs.obstacle(name)


def automatic_attention(
    needs: AttentionNeeds,
    *,
    cuda: bool,
    bfloat16: bool,
    compute_dtype: str,
    flash_package: bool,
    training: bool,
    varlen_runs: bool = True,
) -> AttentionChoice:
    """Return the attention of `model.attention: auto`. varlen_runs: whether varlen's kernels can be
    built there. On a GPU of capability 8.0 (`bfloat16`) in 16 bits: for training varlen; for needs
    that it lacks, and for evaluation, flash_attention_2 with its package; for what is left of
    training flex. Otherwise stock Transformers' sdpa, or eager for soft-capped scores and sinks;
    but training takes flex for sinks, for rows that processes share, and if masks would let packed
    documents see each other."""
    if cuda and bfloat16 and compute_dtype != "float32":
        obstacle = needs.varlen_obstacle()
        if training and obstacle is None and varlen_runs:
            return AttentionChoice(VARLEN, "the fastest for this model")
        # Transformers passes the cap, and pads narrow values.
        packs = needs.obstacle(FLASH) is None and not (training and needs.masked)
        if flash_package and packs:
            return AttentionChoice(FLASH, "its package is installed")
        if training and needs.flex_obstacle() is None:
            faster = " without the package flash-attn (with it: flash_attention_2)" if packs else ""
            obstacle = obstacle or "its kernels cannot be built here"
            return AttentionChoice(FLEX, f"for this model{faster}, not varlen: {obstacle}")
    if training and needs.flex_obstacle() is None:
        if needs.rows_shared:
            return AttentionChoice(FLEX, "processes share rows, so they exchange heads")
        if needs.sinks or needs.masks_of_rows:
            return AttentionChoice(FLEX, "the family's masks let packed documents see each other")
    if needs.softcap or needs.sinks:
        return AttentionChoice("eager", "sdpa has no soft-capped scores and no attention sinks")
    if needs.no_sdpa:
        return AttentionChoice("eager", "this model's class rules sdpa out")
    return AttentionChoice("sdpa", "the fastest of stock Transformers here")
