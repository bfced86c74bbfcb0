"""How the embedded model was made: its text, its training, its export."""
