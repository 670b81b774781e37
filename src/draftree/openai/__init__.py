"""Requests and answers in OpenAI's shape. Knows no HTTP."""
