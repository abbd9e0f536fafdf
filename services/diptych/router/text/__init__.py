"""From chats and text to token ids at the router, and from output back to messages (`parsing`)."""
