"""The model that is trained: frozen weights, adapters on top, and the loss.

`architecture` describes a model without torch. `layers` holds the matmuls, norms and attention.
The modules here build a model of them: begin with `nf4_model`, `lora` and `training_module`.
It imports `system` and `settings`, never `distributed`: a model does not know how it is sharded."""
