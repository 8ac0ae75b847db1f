"""What each term of a predicted peak is, for people who read a forecast."""

EXPLANATIONS = {
    "process": "Python, PyTorch and Transformers themselves (host memory)",
    "nf4_weights": "packed NF4 weights of the decoder linears: half a byte each, sharded",
    "nf4_scales": "absmax per block, and its own absmax per 256 blocks; sharded",
    "nf4_tables": "code tables of every linear, replicated",
    "embedding_and_head": (
        "embedding (unless it is on the host) and output head in the compute type, sliced"
    ),
    "norms_and_biases": "norms and biases in the compute type, sharded",
    "module_weights": "embedding or head that is trained whole: masters in fp32, sliced",
    "module_gradients": "gradients of embedding or head in fp32, sliced",
    "new_module_gradients": (
        "those of the micro-batch in progress, before they are added to earlier ones"
    ),
    "module_workspace": "a trained head in the compute type, and what its gradient is made from",
    "lora_weights": "adapter masters A and B in fp32, sharded",
    "adam_moments": "the optimizer's states, sharded",
    "lora_gradients": "adapter gradients in fp32, sharded",
    "inputs": "token ids, positions, targets and rotary tables of a micro-batch",
    "cublas_workspace": "workspace of the matrix products",
    "gathered_layer": (
        "one decoder layer gathered from all processes, or from host memory, and packed weights of "
        "the next one"
    ),
    "gathered_layers": (
        "all decoder layers, kept from forward to backward (reshard_after_forward false)"
    ),
    "gather_buffer": "buffer that the next decoder layer is gathered into",
    "gathered_rows": (
        "hidden states of one chunk of rows from all slices of the head, and their gradient"
    ),
    "layer_inputs": "input of every decoder layer, kept for recomputation",
    "saved_activations": "activations that autograd keeps, inputs of recomputed layers too",
    "offloaded_activations": "activations on their way to or from host memory",
    "attention_mask": "masks of packed rows",
    "hidden_states": "hidden states around final norm and loss, and their gradient",
    "logits": "logits of one chunk of rows: fp32 softmax and gradients",
    "adapter_casts": "LoRA adapters in the compute type",
    "row_norms": "row norms of the weights with their adapters (DoRA), made once a step",
    "layer_workspace": "temporaries of one decoder layer",
    "dequantized_weight": "the largest linear, dequantized for its product",
    "gathered_gradients": (
        "one layer's adapter gradients before they are reduced, and the reduction's input"
    ),
}
