"""A conversation with a loaded model: turns through its chat template, answers while they are made.

Without a chat template each text is continued by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.evaluation.evaluated_models import Loading
from workflow.lib.evaluation.sample_answers import stop_token_ids
from workflow.lib.export.stock_models import load_options
from workflow.lib.model.backends import choose_device
from workflow.lib.settings.config import ModelConfig
from workflow.lib.system.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    stop_ids: list[int]  # tokens that end an answer
    max_new_tokens: int = 512
    temperature: float = 0.0  # 0: always the likeliest token

    def config(self, *, max_new_tokens: int) -> GenerationConfig:
        drawn = {"temperature": self.temperature} if self.temperature else {}
        return GenerationConfig(
            do_sample=bool(self.temperature),
            max_new_tokens=max_new_tokens,
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
            **drawn,
        )


@dataclass
class Conversation:
    """The turns so far, and what answers them."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    system: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)

    @torch.no_grad()
    def answer(self, text: str, *, streamer: TextStreamer | None = None) -> str:
        """Return the model's answer to a user's turn, and keep both; an answer that is interrupted
        or fails leaves the turns as they were. streamer: gets the tokens as they are made. Raises
        `UserError` if the conversation leaves no room in the model's context."""
        turns = [*self.turns, {"role": "user", "content": text}]
        ids = self._ids(turns, text).to(self.model.device)
        output = self.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self.sampling.config(max_new_tokens=self._room(ids.shape[1])),
            streamer=streamer,
        )
        made = str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        if self.tokenizer.chat_template is not None:
            self.turns = [*turns, {"role": "assistant", "content": made}]
        return made

    def _ids(self, turns: list[dict[str, str]], text: str) -> torch.Tensor:
        """Return the token ids of a prompt (1, tokens)."""
        if self.tokenizer.chat_template is None:
            ids: torch.Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
            return ids
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt: Any = self.tokenizer.apply_chat_template(
            [*system, *turns],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            **self.template_kwargs,
        )
        rendered: torch.Tensor = prompt["input_ids"]
        return rendered

    def _room(self, prompt_tokens: int) -> int:
        """Return how many tokens an answer may have."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = self.sampling.max_new_tokens
        if limit is not None:
            room = min(room, limit - prompt_tokens)
        if room < 1:
            raise UserError(
                f"the conversation has {prompt_tokens} tokens, and the model's context ends at "
                f"{limit}. Begin a new one (/new)."
            )
        return room


def open_conversation(
    checkpoint: Checkpoint,
    exported: Path,
    *,
    adapter: Adapter | None,
    settings: ModelConfig,
    max_new_tokens: int,
    temperature: float,
) -> Conversation:
    """Load a model, with an adapter on it. exported: the trained adapter's folder, with tokenizer,
    chat template of the training and the tokens that end a turn."""
    options = load_options(checkpoint, device=choose_device(), settings=settings)
    model = Loading(options, shards=None).model(checkpoint, adapter)
    tokenizer = load_tokenizer(exported)
    ends = GenerationConfig.from_pretrained(exported).eos_token_id
    stop_ids = stop_token_ids([], tokenizer=tokenizer, model=model)
    stop_ids += ends if isinstance(ends, list) else [] if ends is None else [ends]
    sampling = Sampling(sorted(set(stop_ids)), max_new_tokens, temperature)
    return Conversation(model, tokenizer, sampling)
