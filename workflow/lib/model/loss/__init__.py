"""The loss of a micro-batch, from the last hidden states to one number.

Begin with `chunked_loss` (the head's matmul and cross-entropy, a chunk of rows at a time);
`loss_scale` keeps gradients of float16 in range. `tried_head` tries how a family makes logits."""
