"""An OpenAI-compatible HTTP server (extra ``serve``)."""
