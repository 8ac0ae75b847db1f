"""Parts of decoder layers replaced by fused operations. Begin with `fuse_layers`, which finds them
by what they compute. Not here: the kernels (`model.layers`), and how a part is found by trying
(`model.tried_classes`)."""
