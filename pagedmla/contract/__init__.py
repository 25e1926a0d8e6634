"""The contract: what is asked, what is promised, who takes it, and the errors that say otherwise."""
