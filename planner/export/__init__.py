"""A plan in formats of other tools: Graphviz, Perfetto, onnxruntime."""
