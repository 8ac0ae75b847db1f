"""Parts of decoder layers replaced by fused operations. Begin with `fuse_layers`. Not here: the
kernels (`model.layers`), and the comparison of classes (`model.tried_classes`)."""
