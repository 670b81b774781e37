"""Measurements that are no part of the package: they use it, it never imports them."""
