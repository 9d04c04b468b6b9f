"""The page: one file a part of it, thin handlers, gradio and nothing of torch."""
