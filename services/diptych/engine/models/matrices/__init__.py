"""The matrices that tokens are multiplied by, in the formats they are kept in, and how a checkpoint becomes them."""
