// Watches the server: shows in the header what it serves or why it does not, and notices when it goes and comes back.

import { health, models } from "./api.js";
import { apiKey, askForKey, keyIsAccepted } from "./api_key.js";

const SECONDS_WELL = 5;
const SECONDS_ILL = 1;

const status = document.getElementById("status");

export class ServerState {
  // `onModels` is called with the names of the models whenever the server has become ready.
  constructor(onModels) {
    this.onModels = onModels;
    this.models = null;
    this.served = undefined;
    this.timer = null;
    this.checking = null;
  }

  start() {
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    return this.check();
  }

  // Asks the server now, and again after a while. Never throws.
  check() {
    clearTimeout(this.timer);
    this.checking ??= this.ask().finally(() => {
      this.checking = null;
      const seconds = this.models === null ? SECONDS_ILL : SECONDS_WELL;
      this.timer = setTimeout(() => document.hidden || this.check(), 1000 * seconds);
    });
    return this.checking;
  }

  // Asks for the models again: the key has changed.
  async recheck() {
    await this.checking;
    this.models = null;
    return this.check();
  }

  async ask() {
    try {
      const { status: state, reason, percent, model } = await health();
      if (state !== "ready") {
        this.lose(percent === undefined ? `${state}: ${reason}` : `${state}, ${percent} %: ${reason}`);
      } else if (this.models === null || model !== this.served) {
        this.models = await models(apiKey());
        this.served = model;
        keyIsAccepted();
        this.onModels(this.models);
        say(this.models.join(", "), false);
      }
    } catch (error) {
      if (error.unauthorized) {
        askForKey();
        this.lose("The server needs an API key.");
      } else {
        this.lose(error.unreachable ? "The server cannot be reached. Trying again." : error.message);
      }
    }
  }

  lose(text) {
    this.models = null;
    say(text, true);
  }
}

function say(text, bad) {
  if (status.textContent !== text) {
    status.textContent = text;
    status.title = text;
  }
  status.classList.toggle("bad", bad);
}
