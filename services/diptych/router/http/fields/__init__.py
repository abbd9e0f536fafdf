"""Request fields that several APIs share: sampling, choices, grammars, tools, and values that ask for nothing."""
