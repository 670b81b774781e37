"""Files alone: a draft head of draftree for Qwen2.5-Coder-1.5B-Instruct."""
