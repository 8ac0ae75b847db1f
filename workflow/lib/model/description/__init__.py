"""What a decoder layer is made of, seen by running it once on the meta device.

Begin with `layer_kinds` (`described_layers`); `describe_model` describes a whole model by it.
`layer_calls` writes down what a layer calls. Nothing computes values."""
