"""`check_served/served.json`, written by `evaluation.served_checks`."""

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.settings.subjects import SubjectName


class ServedPart(Record):
    """The adapter, or one kind of its modules with the others zeroed, served and in PEFT. Effects
    and differences are root mean squares over tokens, nats."""

    part: str  # `adapter` for all of it, or a kind of module
    effect: float  # what it changes in the log-probabilities in PEFT
    served_effect: float  # what it changes in those of the server
    share: float
    """The served change along that of PEFT, as its share: 1 the same, 0 ignored."""
    difference: float  # log-probabilities of the server - those of PEFT


class ServedCheck(Record):
    """`check_served/served.json`: what a server makes of the exported files."""

    server: str  # its name and version
    subject: SubjectName  # which model it serves
    compute_dtype: str  # type of its computation, or the format of the GGUF file
    max_lora_rank: int | None  # its largest rank as it was started; null for a merged model
    documents: int  # held-out documents: all that the evaluation measured; the first with GGUF
    loss: float  # nats per trained token, by the server
    evaluated_loss: float  # the same by the evaluation
    trained_loss: float | None
    """The same of the adapter on the base that it was trained on; null if that is not measured."""
    bound: float
    """Nats: the largest difference allowed of a document's loss and of a part; of a GGUF file that
    of the mean loss."""
    worst_document: float  # largest difference of a document's loss, nats per token
    prompts: int  # conversations and texts whose token ids are those of the training
    answers: int  # held-out prompts that it answered greedily
    equal_answers: int  # answers that are those of the evaluation
    answer_gap: float
    """Nats by which a token of its greedy answers is at most less likely than the most likely one,
    in Transformers."""
    parts: list[ServedPart]  # none of a merged model
    provenance: Provenance  # what made the file

    @property
    def cost(self) -> float | None:
        """Nats per token that serving it loses against what was trained; None if not measured."""
        return None if self.trained_loss is None else self.loss - self.trained_loss

    @property
    def told(self) -> str:
        """What was found, in a line."""
        acts = ", ".join(f"{part.part} {part.share:.1%}" for part in self.parts)
        return (
            f"loss of {self.documents} held-out documents {self.loss:.4f} nats per token, by the "
            f"evaluation {self.evaluated_loss:.4f} ({self.bound:.2g} allowed), a document at most "
            f"{self.worst_document:.2g} apart; {self.prompts} prompts with the same token ids; "
            f"{self.equal_answers} of {self.answers} greedy answers the same"
            + (f"; change of log-probabilities as in PEFT: {acts}" if acts else "")
        )
