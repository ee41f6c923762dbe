"""Jacobians as linear operators and their top singular vectors.

In: functions of tensors and frozen weights. Out: products with J and J^T, dense Jacobians, top-K singular triplets with a
certificate.
"""
