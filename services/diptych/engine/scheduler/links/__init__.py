"""The links of one scheduler to its peers: brought up, tested, used for pages and notes, and taken down."""
