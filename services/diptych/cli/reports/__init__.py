"""What commands print about members, links, pools and drains. Pure: from messages to lines."""
