"""How target logits over draft trees turn into accepted tokens. Never drafts, never touches a cache."""
