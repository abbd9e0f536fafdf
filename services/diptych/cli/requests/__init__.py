"""Clients that commands use: of members (`asking`), of routers' inference, and of the transfer benchmark."""
