"""Bytes of one process at the peak of each phase of a step, by term."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from workflow.lib.planning.work import Work, summed

Terms = dict[str, int]
"""Bytes by term."""

PROCESS, WORKSPACE = "process", "cublas_workspace"
EXPLANATIONS = {
    "process": "Python, PyTorch and Transformers themselves (host memory)",
    "nf4_weights": "frozen weights of decoder linears, sharded: half a byte each, in 16 bits two",
    "nf4_scales": "absmax per block, and its own absmax per 256 blocks; sharded",
    "nf4_tables": "code tables of every linear, replicated",
    "embedding_and_head": (
        "embedding (unless it is on the host) and output head in the compute dtype, sliced"
    ),
    "norms_and_biases": "norms and biases in the compute dtype, sharded",
    "module_weights": "embedding or head that is trained whole: masters in fp32, sliced",
    "module_gradients": "gradients of embedding or head in fp32, sliced",
    "lora_weights": "adapter masters A and B in fp32, sharded",
    "adam_moments": "both moments of AdamW in fp32 or in 8 bits, sharded",
    "lora_gradients": "adapter gradients in fp32, sharded",
    "inputs": "token ids, positions, targets and rotary tables of a micro-batch",
    "cublas_workspace": "workspace of the matmuls",
    "gathered_layer": (
        "one decoder layer gathered from all processes, or from host memory, and packed weights of "
        "the next one"
    ),
    "gather_buffer": "buffer that the next decoder layer is gathered into",
    "gathered_rows": (
        "hidden states of one chunk of rows from all slices of the head, and their gradient"
    ),
    "saved_activations": "activations that autograd keeps, inputs of recomputed layers too",
    "offloaded_activations": "activations on their way to or from host memory",
    "hidden_states": "hidden states around final norm and loss, and their gradient",
    "logits": "logits of one chunk of rows: fp32 softmax and gradients",
    "adapter_casts": "LoRA adapters in the compute dtype",
    "layer_workspace": "temporaries of one decoder layer",
    "dequantized_weight": "the largest linear, dequantized for its matmul",
    "decoded_weights": "frozen weights that stay decoded (hardware.keep_decoded)",
    "gathered_gradients": (
        "one layer's adapter gradients before they are reduced, and the reduction's input"
    ),
}


@dataclass(frozen=True)
class Peaks:
    """Peaks of a process, bytes."""

    phases: dict[str, Terms]
    """Allocated bytes on the device at the peak of each phase, in their order."""
    host_bytes: int = 0  # page-locked memory of the host
    work: Work = field(default_factory=Work)  # of the process in the step

    @property
    def phase_bytes(self) -> dict[str, int]:
        return {name: sum(terms.values()) for name, terms in self.phases.items()}

    @property
    def peak_phase(self) -> str:
        sizes = self.phase_bytes
        return max(sizes, key=sizes.__getitem__)

    @property
    def terms(self) -> Terms:
        """Bytes by term in the peak phase."""
        return self.phases[self.peak_phase]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the peak phase."""
        return sum(self.terms.values())

    def on_cpu(self, process_bytes: int) -> "Peaks":
        """Return the peaks of a CPU process of `process_bytes`: matmuls take no workspace."""
        return Peaks(
            {
                name: {PROCESS: process_bytes} | {x: n for x, n in terms.items() if x != WORKSPACE}
                for name, terms in self.phases.items()
            },
            work=self.work,
        )


def combined(parts: Iterable[tuple[Peaks, float]]) -> Peaks:
    """Return the sum of peaks, each times a factor, term by term; no term is below 0."""
    parts = [*parts]
    phases: dict[str, dict[str, float]] = {}
    host = 0.0
    for peaks, factor in parts:
        host += factor * peaks.host_bytes
        for name, terms in peaks.phases.items():
            sums = phases.setdefault(name, {})
            for term, size in terms.items():
                sums[term] = sums.get(term, 0.0) + factor * size
    rounded = {
        name: {term: round(size) for term, size in sums.items() if size >= 1}
        for name, sums in phases.items()
    }
    work = summed((peaks.work, factor) for peaks, factor in parts)
    return Peaks(rounded, max(0, round(host)), work)
