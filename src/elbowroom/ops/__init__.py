"""Facts about ATen ops."""
