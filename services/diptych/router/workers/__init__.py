"""Workers as the router knows them: sessions, reports, legs in flight, and what is learned from them."""
