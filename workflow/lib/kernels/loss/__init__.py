"""Logits and their gradients for the loss, and matmuls with heads of any number of rows. No fp32
copy of the logits is made."""
