"""Sampling of answers by vLLM, with a request for each answer, as each has a seed of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from workflow.lib.evaluation.vllm_server import VllmServer
from workflow.lib.rounds.answers import Answer
from workflow.lib.rounds.generation import Ends, Request
from workflow.lib.settings.rounds import AnswersConfig

AT_ONCE = 256  # answers in a batch, vLLM's own default on one GPU


def sample_served(
    server: VllmServer,
    requests: Sequence[Request],
    settings: AnswersConfig,
    *,
    model: str,
    ends: Ends,
    on_answers: Callable[[int, int], None],
) -> list[Answer]:
    """Return an answer for each request, as `generation.sample` does. model: `BASE`, or the name of
    an adapter. Raises `UserError` if the server ends."""

    def sampled(request: Request) -> Answer:
        choice = server.continued(
            request.prompt,
            model,
            **settings.model_dump(include={"temperature", "top_p", "stop"}),
            max_tokens=settings.max_new_tokens,
            stop_token_ids=ends.ids,
            seed=request.key >> 65,  # of 63 bits
            logprobs=0,
            return_token_ids=True,
        )
        return ends.cut(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    answers, pool = [], ThreadPoolExecutor(AT_ONCE)
    try:
        for answer in pool.map(sampled, requests):
            on_answers(1, len(answer.ids))
            answers.append(answer)
    finally:  # of an interrupted stage the server ends first, and with it the requests
        pool.shutdown(wait=False, cancel_futures=True)
    return answers
