"""A DeiT-style ViT on CIFAR10 and its weight-decay x stochastic-depth grid."""
