"""One HTTP exchange: body, key, fields, answer or stream, disconnection; and the applications made of it."""
