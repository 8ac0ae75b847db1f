"""Make a tiny mixture of experts of the shipped base model: the model of
`workflow/presets/mixture-demo.yaml`.

Sparse upcycling (Komatsuzaki et al., arXiv 2212.05055): the feed-forward of each layer
becomes the experts, all of them copies of it, and a random router stands before them. Mixtral's
router gives the chosen experts weights that sum to one, so the mixture begins with the logits of
the base model. Its experts then learn different things, as each sees other tokens.

    python -m workflow.scripts.upcycle_base

It takes five seconds on a CPU, needs torch and transformers, and asks for no network.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

BASE = Path(__file__).resolve().parents[1] / "resources" / "base"
OUTPUT = Path("models/pydocs-mixture")  # the source of the preset's model
NUM_EXPERTS, TOP_K = 8, 2  # as Mixtral 8x7B
ROUTER_STD = 0.02  # what Mixtral initializes its weights with
SEED = 0
LLAMA_KEYS = ("model_type", "architectures", "mlp_bias", "pretraining_tp")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=BASE, help="folder of a Llama")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    dense: Any = AutoModelForCausalLM.from_pretrained(args.base, trust_remote_code=False)
    mixture = upcycled(dense)
    mixture.save_pretrained(args.output)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(args.base / file, args.output / file)
    print(
        f"{args.output}: {dense.num_parameters():,} parameters became "
        f"{mixture.num_parameters():,}, {NUM_EXPERTS} experts in each of "
        f"{mixture.config.num_hidden_layers} layers, {TOP_K} of them for a token"
    )


def upcycled(dense: Any) -> MixtralForCausalLM:
    """Return a Mixtral whose experts are copies of the feed-forwards of `dense`, a Llama."""
    config = {k: v for k, v in dense.config.to_dict().items() if k not in LLAMA_KEYS}
    mixtral = MixtralConfig(
        **config, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, sliding_window=None
    )
    mixture: MixtralForCausalLM = AutoModelForCausalLM.from_config(
        mixtral, dtype=dense.dtype, trust_remote_code=False
    )
    weights = dense.state_dict()
    draw = torch.Generator().manual_seed(SEED)
    for number, layer in enumerate(mixture.model.layers):
        start = f"model.layers.{number}.mlp."
        gate, up, down = (weights.pop(f"{start}{n}_proj.weight") for n in ("gate", "up", "down"))
        router = layer.mlp.gate.weight
        values = torch.randn(router.shape, generator=draw) * ROUTER_STD
        weights[f"{start}gate.weight"] = values.to(dense.dtype)
        weights[f"{start}experts.gate_up_proj"] = torch.cat([gate, up]).repeat(NUM_EXPERTS, 1, 1)
        weights[f"{start}experts.down_proj"] = down.repeat(NUM_EXPERTS, 1, 1)
    mixture.load_state_dict(weights)
    return mixture


if __name__ == "__main__":
    main()
