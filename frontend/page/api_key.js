// The box that asks for an API key. The key lives in this box alone: it is neither stored nor shown.

const box = document.getElementById("key_box");
const field = document.getElementById("api_key");
const reason = document.getElementById("key_reason");

export const apiKey = () => field.value;

export function askForKey() {
  reason.textContent = field.value
    ? "The server does not accept this API key. Check it and enter it again."
    : "This server needs an API key. Enter the one that you were given; it is forgotten when you leave this page.";
  field.setAttribute("aria-invalid", String(field.value !== ""));
  if (box.hidden) {
    box.hidden = false;
    field.focus();
  }
}

export function keyIsAccepted() {
  box.hidden = true;
  field.setAttribute("aria-invalid", "false");
}

export function onKey(listener) {
  field.addEventListener("change", listener);
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    listener();
  });
}
