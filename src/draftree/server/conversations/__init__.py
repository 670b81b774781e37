"""Conversations as clients send them and are answered: chats, responses, and the functions that they let be called."""
