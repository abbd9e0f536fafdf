"""The router's HTTP APIs: rooms by API, `fields` that they share, `exchange` for what every request goes through."""
