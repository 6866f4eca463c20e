"""The guarantee statement: what it says, and how it is checked."""
