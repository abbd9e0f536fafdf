"""Load on a server of OpenAI's API. What is asked, and what it comes to, is pure; `client` and `sending` act."""
