"""Images of prompts: fetched from where clients say they are, decoded, and scaled as the model wants them."""
