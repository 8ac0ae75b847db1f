"""The harness's view of a loaded model (lm_eval 0.4.13): its requests divided among processes, in
batches that fit.

All processes hold all requests, and each runs its share of them. The harness itself sees one
process only, so its scores come from the same answers for any number of processes."""

from collections.abc import Callable
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import nn
from transformers import PreTrainedTokenizerBase

from workflow.lib.distributed.work_sharing import in_step, is_sharded, shared_out
from workflow.lib.distributed.world import World
from workflow.lib.evaluation.batch_size import fitting_batch_size, halving
from workflow.lib.model.layers.rotary_by_length import in_groups, rotated_alike
from workflow.lib.system.progress import Progress

WINDOWS = 64


class SharingHFLM(HFLM):  # type: ignore[misc]
    """The harness's model on a share of the requests, in batches that fit, with our `Progress`."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | str,
        world: World | None,
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1)
        self._setting, self._world = batch_size, world
        self._progress: Progress | None = None

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return self._shared(requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        # Windows come in groups of this many; each group is batched by memory.
        self.batch_size_per_gpu = WINDOWS
        return self._shared(requests, super().loglikelihood_rolling)

    def _shared(self, requests: Any, answer: Callable[..., list[Any]]) -> list[Any]:
        return shared_out(
            requests, lambda mine: answer(mine, True), world=self._world, model=self.model
        )

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        drawn = any(request.args[1].get("do_sample") for request in requests)
        # Draws use one stream of random numbers: shares would draw others.
        if drawn:
            with in_step(self.model, world=self._world):
                return self._generate(requests)
        return shared_out(requests, self._generate, world=self._world, model=self.model)

    def _generate(self, requests: list[Any]) -> list[str]:
        if not requests:
            return []
        longest = max(len(self.tok_encode(request.args[0])) for request in requests)
        return self._in_batches(
            lambda: in_groups(
                requests,
                self._generated_alike,
                lambda alike: super(SharingHFLM, self).generate_until(alike, True),
            ),
            requests=len(requests),
            tokens=longest + self.max_gen_toks,
            keeps_cache=True,
        )

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The common path of both kinds of log-likelihood, with known lengths."""
        if not requests:
            return []
        return self._in_batches(
            lambda: in_groups(
                requests,
                self._scored_alike,
                lambda alike: super(SharingHFLM, self)._loglikelihood_tokens(alike, True),
            ),
            requests=len(requests),
            tokens=max(len(context) + len(answer) for _, context, answer in requests),
        )

    def _scored_alike(self, request: tuple[Any, list[int], list[int]]) -> tuple[int, ...]:
        """Return the key of requests that may share a batch; the last token is a target."""
        _, context, answer = request
        tokens = min(len(context) + len(answer) - 1, self.max_length)
        return rotated_alike(self.model.config, tokens)

    def _generated_alike(self, request: Any) -> tuple[int, ...]:
        prompt, gen_kwargs = request.args
        new_tokens: int = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)["max_gen_toks"]
        tokens = min(len(self.tok_encode(prompt)), self.max_length - new_tokens)
        return rotated_alike(self.model.config, tokens, new_tokens=new_tokens)

    def _model_generate(self, context: Any, *args: Any, **options: Any) -> Any:
        """Generate without Transformers' `synced_gpus`, which needs equal numbers of calls."""
        output = super()._model_generate(context, *args, synced_gpus=False, **options)
        self._count(len(context))
        return output

    def _model_call(self, inps: Any, *args: Any, **options: Any) -> Any:
        logits = super()._model_call(inps, *args, **options)
        self._count(len(inps))
        return logits

    def _count(self, requests: int) -> None:
        if self._progress is not None:
            self._progress.add(requests)

    def _in_batches(
        self,
        compute: Callable[[], list[Any]],
        *,
        requests: int,
        tokens: int,
        keeps_cache: bool = False,
    ) -> list[Any]:
        def with_size(size: int) -> list[Any]:
            self.batch_size_per_gpu = size
            with Progress("tasks", total=requests, unit="requests") as self._progress:
                return compute()

        start = fitting_batch_size(
            self._setting,
            config=self.model.config,
            device=self.device,
            tokens=min(tokens, self.max_length),
            keeps_cache=keeps_cache,
        )
        return halving(with_size, start=start, what="tasks", collective=is_sharded(self.model))
