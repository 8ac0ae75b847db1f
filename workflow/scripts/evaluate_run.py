"""Measure the exported adapter and its base: held-out loss, harness tasks, sample answers.

Reads the NF4 base, the exported adapter and the held-out tokens, all through stock Transformers and
PEFT; one copy of the weights serves both subjects, with the adapter switched off and on. Writes `base.json` and
`tuned.json`. Works without a network unless `evaluate.tasks` names a task that is not in `evaluate.tasks_dir`.
"""

import argparse
import logging
import os
from pathlib import Path

from workflow.lib.artifacts import provenance, write_json
from workflow.lib.config import EvaluateConfig, ModelConfig
from workflow.lib.local_tasks import environment
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    model_settings = ModelConfig.model_validate(args.config["model"])
    settings = EvaluateConfig.model_validate(args.config["evaluate"])
    # Hugging Face libraries read these variables when they are imported, so they are imported after.
    os.environ.update(environment(settings.tasks, settings.tasks_dir))
    from workflow.lib import evaluation, inference
    from workflow.lib.tokenizer import load_tokenizer, read_chat_template
    from workflow.lib.tokens import TokenStore

    device = inference.choose_device()
    dtype = inference.resolve_dtype(model_settings.compute_dtype, device)
    attention = inference.resolve_attention(
        model_settings.attention,
        device,
        compute_dtype=dtype,
        softcapped=inference.softcaps_attention(args.base),
    )
    tokenizer = load_tokenizer(args.base)
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(tokenizer, args.chat_template)
    store = TokenStore.open(args.tokens)
    questions = evaluation.prepare(store, tokenizer=tokenizer, settings=settings)
    logger.info(
        "%s, %s, %s: loss of %d of %d held-out documents, %d samples, tasks: %s",
        device.type, str(dtype).removeprefix("torch."), attention, len(questions.losses_of), store.num_heldout_documents,
        len(questions.prompts), ", ".join(questions.tasks["tasks"]) or "none",
    )  # fmt: skip

    base = inference.load_base(args.base, device=device, compute_dtype=dtype, attention=attention)
    model = inference.load_adapter(base, args.adapter)
    with model.disable_adapter():
        before = evaluation.measure(model, questions, subject="base")
    after = evaluation.measure(model, questions, subject="tuned")

    base_json = evaluation.artifact(before, questions, subject="base", run=args.run)
    tuned_json = evaluation.artifact(after, questions, subject="tuned", run=args.run)
    tuned_json["comparison"] = evaluation.compare(before, after, settings=settings)
    made_by = {"provenance": provenance()}
    write_json(args.output_base, base_json | made_by)
    write_json(args.output_tuned, tuned_json | made_by)
    for line in evaluation.summary_lines(base_json, tuned_json):
        logger.info("%s", line)


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--base", type=Path, required=True, help="folder of the NF4 base")
    parser.add_argument(
        "--adapter", type=Path, required=True, help="folder of the exported adapter"
    )
    parser.add_argument("--tokens", type=Path, required=True, help="folder of the tokens")
    parser.add_argument("--output-base", type=Path, required=True, help="base.json to write")
    parser.add_argument("--output-tuned", type=Path, required=True, help="tuned.json to write")
    parser.add_argument("--chat-template", help="Jinja file; default: the tokenizer's own template")
    run(main, parser)
